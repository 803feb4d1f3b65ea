// Runs matvec.sv and compares its whole memory with what the golden model says.

`timescale 1ns / 1ps

module bench;
  localparam WORDS = 4096, LONGEST = 1000000;

  reg clk = 1'b0, rst = 1'b1;
  wire done, failed;
  reg [11:0] address = 12'd0;
  wire [127:0] word;
  reg [127:0] after[0:WORDS-1];
  integer cycle = 0, differences = 0, index;

  matvec #(.IMAGE("image.hex"), .WORDS(WORDS)) system (
      .clk(clk),
      .rst(rst),
      .done(done),
      .failed(failed),
      .view_address(address),
      .view_data(word)
  );

  always #5 clk = !clk;

  initial begin
    $readmemh("after.hex", after);
    repeat (4) @(negedge clk);
    rst = 1'b0;
    while (!done && !failed && cycle < LONGEST) begin
      @(negedge clk);
      cycle = cycle + 1;
    end
    if (failed) $display("FAIL: the accelerator reports an error");
    else if (!done) $display("FAIL: not done after %0d cycles", LONGEST);
    else begin
      for (index = 0; index < WORDS; index = index + 1) begin
        address = index[11:0];
        @(negedge clk);
        if (word !== after[index]) begin
          if (differences == 0)
            $display("first difference at %h: %h, golden model %h", 16 * index, word, after[index]);
          differences = differences + 1;
        end
      end
      if (differences != 0) $display("FAIL: %0d words differ", differences);
      else $display("PASS: %0d cycles, every byte of the memory as in the golden model", cycle);
    end
    $finish;
  end
endmodule
